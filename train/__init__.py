"""The main job: scripts a person reads top to bottom. Start at gossip_sgd.py."""
