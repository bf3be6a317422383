"""Raw text to a token store: quality filters, deduplication, decontamination, personal data, the recipe, `prepare`."""
