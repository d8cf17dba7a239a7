"""What the processes of a trainer write for a checkpoint, and how."""
