"""The hooks in other people's trainers. Each file needs the library that it is named for."""
