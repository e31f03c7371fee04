"""Everything at once: rude clients, faulty backends and reloads, and the accounts must still be right at the end."""
