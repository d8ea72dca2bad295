"""What two lanes bring: see __main__.py."""
