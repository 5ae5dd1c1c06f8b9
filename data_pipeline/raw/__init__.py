"""Raw click logs: column layouts, partitions of files, parsing and bad rows."""
