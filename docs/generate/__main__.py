"""Write the pages that are made from the code, and the pictures of objectives: ``make docs``."""

from pathlib import Path

from docs.generate import configuration, metrics, models, objectives, rewards, rollout_data, tinker

DOCS = Path(__file__).parents[1]
PAGES = {
    "configuration.md": configuration.page,
    "metrics.md": metrics.page,
    "models.md": models.page,
    "objectives.md": objectives.page,
    "rewards.md": rewards.page,
    "rollout_data.md": rollout_data.page,
    "tinker.md": tinker.page,
}
"""What makes each page of the one that is there."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        text = page((DOCS / name).read_text(encoding="utf-8"))
        (DOCS / name).write_text(text, encoding="utf-8")
    objectives.draw(DOCS / "objectives")
