"""The trusted core of a deployment: what runs at a site and decides its privacy.

`interface` has the three requests that a transport may pass on: an instruction to train, a question
for a noised accuracy, a question for the declaration. Each returns what may leave the site, or None
for a refusal. The package imports no transport library, so a Flower client and any other service
can stand in front of it.

| file | what it does |
|---|---|
| `site_file` | reads the site's own file: records, features, model, budget, limits |
| `site_records` | reads the records, each by itself |
| `site_features` | applies the site's public feature map to each record |
| `feature_rows` | stores features at the site, for its own account only |
| `instruction` | checks an instruction or a question against the site's limits; its hash |
| `training_round` | reserve, train, seal: one noised update |
| `noised_accuracy` | reserve, count, seal: one noised accuracy |
| `site_declaration` | the unit and budget that the site declares, if it opted in |
| `interface` | answers requests; turns every error into the same refusal |
| `check_site` | what `noisewise flower check` prints for the site's people |
"""
