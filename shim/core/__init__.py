"""What everything else stands on: settings, the lines on stderr, wrapping, errors and answers. It imports no other room."""
