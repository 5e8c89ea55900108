"""Programs that show how to use Longshore; run them from the repository's root."""
