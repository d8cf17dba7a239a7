"""The encoding of data between processes on Ray: calls, replies, errors, batches without their padding."""
