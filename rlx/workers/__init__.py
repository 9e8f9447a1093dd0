"""Worker processes: start them, talk to them, end them with what they started."""
