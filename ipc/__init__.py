"""The contract that core and frontends share: messages, parameters, config, codec, transport, clients, server."""
