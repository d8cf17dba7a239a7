"""Environments of other projects: their servers, their packages, tools behind MCP."""
