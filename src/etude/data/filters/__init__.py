"""The filters of the corpus, each a small function or class that returns why a document is dropped, or None.

Their order is cheap and certain first, so that the dear ones see little, and no step reads what an earlier one dropped:

1. `decode`: bytes become text, or the file is no text at all.
2. `language`: code or prose? Data files, images and the like leave here; the later steps know what they look at.
3. `generated`: what no person wrote here (vendored, generated, minified, lock files), by path and by its own heading.
4. `quality`: too short, too long lines, too repetitive: counts over the whole text.
5. `licence`: who may use it, file by file; after the counts, because a classifier may have to read licence texts.
6. `private`: secrets and personal data are replaced, not dropped; in batches, because the detector is a program to start.
   Before duplicates, so that two copies that differ in a scrubbed address only count as copies.
7. `contamination`, against the tasks, and 8. `duplicates`, across all sources: both need to see final texts.
"""
