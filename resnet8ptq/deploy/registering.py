"""A run's model in MLflow's registry, under the alias `recommended`."""

from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.text import one_line
from resnet8ptq.deploy.source import Source
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.tracking import mlflow_model
from resnet8ptq.tracking.store import Store

ALIAS = "recommended"


def register(store: Store, source: Source, name: str, vectors: Vectors, outputs: list[str]) -> str:
    """Register a run's model as the newest version of `name`; return its URI.

    A run of an earlier version of this package, which has logged no model, gets one first.

    Raises:
        TrackingError: the store has no registry, or refuses the name.
    """
    client, run_id = store.client, source.record.run_id
    logged = client.get_run(run_id).outputs
    if logged is not None and logged.model_outputs:
        model_id = logged.model_outputs[0].model_id
    else:
        shapes = {
            each: list(found.shape[1:])
            for each, found in zip(outputs, vectors.outputs, strict=True)
        }
        model_id = mlflow_model.add_model(
            store,
            run_id,
            source.folder,
            source.artifact.name,
            shapes,
            engine=source.record.engine or None,
            image_shape=list(vectors.inputs.shape[1:]),
        )
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
