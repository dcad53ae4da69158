"""Which events go where: the configuration file, the matching of events to endpoints, and how both follow changes."""
