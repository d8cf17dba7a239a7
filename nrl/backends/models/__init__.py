"""Models and tokenizers: one loading path for every backend, and adapters beside the weights."""
