"""``treadle bench``: where the time of a step goes, what the floor would be, and what to switch on."""
