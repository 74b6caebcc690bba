"""The pages, and what makes them: ``site.py`` the site, ``generate`` the parts of pages that the code says itself."""
