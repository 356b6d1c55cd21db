"""The page to look at runs: from all of them down to one token, live, and as a folder of files that needs no server."""
