"""Making a release: the wheels, the sdist, and what is checked before they go out."""
