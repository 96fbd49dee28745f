"""The module of dpwa's adapter; importing it is an error that tells the line to write."""

raise ImportError(
    "got gossip_modules.dpwa.adapters, expected the averager: write from gossip_modules.dpwa import PairwiseAverager, "
    "PairwiseConfig, then PairwiseAverager(net, PairwiseConfig.from_yaml(name, config_file)) for "
    "DpwaPyTorchAdapter(net, name, config_file)"
)
