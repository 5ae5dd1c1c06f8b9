"""Text tables and plots that several commands and scripts share."""
