"""Search as a tool: ranking, passages, and how short answers are compared."""
