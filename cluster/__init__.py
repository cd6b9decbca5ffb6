"""Who runs where, and when: the driver, the coordinator, placement and rollout."""
