"""Programs that run in sandboxes, beside what models wrote; of the standard library alone, since there is no other."""
