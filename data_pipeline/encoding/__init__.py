"""From parsed samples to numbers and embedding rows: fitted transforms, vocabularies and hashes."""
