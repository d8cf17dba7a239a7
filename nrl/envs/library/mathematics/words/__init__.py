"""Read words around answers and within them: statements, doubts, units, numbers in words, ways to write an answer."""
