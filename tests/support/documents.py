"""The pages of the documentation whose programs each run as a separate job."""

RECIPES = {
    f"docs/{page}.md"
    for page in (
        *("migrate/from-keras-2", "train/batch-norm", "train/checkpoints"),
        *("train/data", "train/models"),
    )
}
