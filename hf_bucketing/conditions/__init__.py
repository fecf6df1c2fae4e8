"""What a sample is shown beside its pixels and its caption: conditions, their rules, rows and draws."""
