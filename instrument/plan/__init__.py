"""What was asked, held against one model: the sites, what they will write, and how it is shown."""
