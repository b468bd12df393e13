"""Other projects' names and signatures, forwarded to our operations: switch by one import."""
