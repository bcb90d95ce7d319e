"""Parts that elastic jobs alone need: discovery of hosts, agents that come and go, slots of workers."""
