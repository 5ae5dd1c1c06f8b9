"""Worker processes of `cowrec serve --workers`, which answer requests from tables in shared memory."""
