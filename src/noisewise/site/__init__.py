"""The trusted core of a deployment: what runs at a site and decides its privacy.

`interface` has the three requests that a transport may pass on: an instruction to train, a question
for a noised score, a question for the declaration. Each returns what may leave the site, or None
for a refusal. The package imports no transport library. `vault` answers the same requests through a
Unix socket, under an account of its own (docs/vault.md).

| file | what it does |
|---|---|
| `site_config` | the fields of the site's own file |
| `site_file` | reads this file: records, features, model, plan, ledger |
| `site_records` | reads the records, each by itself |
| `site_features` | applies the site's public feature map to each record |
| `feature_rows` | stores features at the site, for its own account only |
| `requests` | an instruction and a question, as they arrive |
| `instruction` | checks an instruction or a question against the site's limits; its hash |
| `training_round` | reserve, train, seal: one noised update |
| `noised_score` | reserve, count, seal: one noised score |
| `site_declaration` | the unit and budget that the site declares, if it opted in |
| `interface` | answers requests; turns every error into the same refusal |
| `frames`, `tensor_bytes` | the bytes between a relay and a vault |
| `vault_socket` | Unix sockets; the only file that imports `socket` |
| `vault_config` | `[vault]` of the site's file |
| `vault_checks` | what would void the separation of accounts |
| `loaded_site` | a site whose records stay in memory |
| `vault` | answers connections |
| `serve_site` | starts a vault |
| `check_site` | what `noisewise flower check` prints for the site's people |
"""
