"""Members of a channel: roster, hosts, links, and admission."""
