"""Small mistakes put into the native core, each of which some test must notice."""
