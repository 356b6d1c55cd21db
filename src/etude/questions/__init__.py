"""Questions with verifiable answers: sets, strict grading, a judge for rubrics, search in a corpus, demonstrations."""
