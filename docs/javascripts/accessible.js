// Names and keyboard access that the theme leaves out.
for (const dialog of document.querySelectorAll(".md-search[role=dialog]")) dialog.setAttribute("aria-label", "Search");
for (const block of document.querySelectorAll("pre, .md-typeset__scrollwrap")) block.tabIndex = 0;
