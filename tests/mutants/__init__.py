"""Small deliberate mistakes in the native core. A test must notice each mistake."""
