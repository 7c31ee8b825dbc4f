"""The commands: each a typed function, of which its arguments, options and help are made."""
