"""Raw files as blocks of samples: what is an input, and reading of text, Parquet and Arrow files in parts."""
