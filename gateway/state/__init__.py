"""State shared by replicas: who holds what on a backend, in memory and on Redis, behind one interface (`leases`)."""
