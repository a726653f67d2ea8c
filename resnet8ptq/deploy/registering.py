"""Registers a run's model in MLflow's registry, under the alias `recommended`."""

from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.text import one_line
from resnet8ptq.deploy.source import Source
from resnet8ptq.tracking.store import Store

ALIAS = "recommended"


def register(store: Store, source: Source, name: str) -> str:
    """Register a run's model as the newest version of `name`; return its URI.

    Raises:
        TrackingError: the run has no logged model; the store has no registry, or refuses the name.
    """
    client, run_id = store.client, source.record.run_id
    logged = client.get_run(run_id).outputs
    if logged is None or not logged.model_outputs:
        raise TrackingError(f"register: run {run_id} has logged no model; try a new run")
    model_id = logged.model_outputs[0].model_id
    try:
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        uri = client.get_logged_model(model_id).artifact_location
        version = client.create_model_version(name, uri, run_id, model_id=model_id).version
        if source.use:
            client.set_model_version_tag(name, version, "use", source.use)
        client.set_registered_model_alias(name, ALIAS, version)
    except Exception as error:  # MLflow's, SQLAlchemy's
        raise TrackingError(
            f"register: {name!r} cannot be registered ({one_line(error)})"
        ) from None
    return f"models:/{name}@{ALIAS}"
