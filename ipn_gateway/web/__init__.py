"""HTTP: parse, authorise, make one call, render. Nothing here decides; nothing below here knows about HTTP."""
