"""Raw click logs: layouts of columns, partitions of files, parsing, and bad lines."""
