"""What took how long: the timeline of all calls, and profiles of single steps."""
