(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  // Filter by method: rows and columns of tables.
  const filter = document.getElementById("filter");
  if (filter) {
    const boxes = all("input", filter);
    const apply = () => {
      const hidden = new Set(boxes.filter(box => !box.checked).map(box => box.value));
      for (const part of all("[data-method]")) part.classList.toggle("off", hidden.has(part.dataset.method));
    };
    filter.hidden = false;
    filter.addEventListener("change", apply);
    document.getElementById("filter-all").addEventListener("click", () => {
      for (const box of boxes) box.checked = true;
      apply();
    });
    apply();
  }
  // Numbers of a mark: by pointer, tap or arrow keys.
  const tip = document.getElementById("tip");
  const hide = () => { tip.textContent = ""; };
  const show = mark => {
    tip.textContent = mark.textContent;
    const box = mark.getBoundingClientRect();
    const left = Math.min(box.right + 6, document.documentElement.clientWidth - tip.offsetWidth - 6);
    const below = box.bottom + 6 + tip.offsetHeight < document.documentElement.clientHeight;
    tip.style.left = `${Math.max(4, left) + scrollX}px`;
    tip.style.top = `${(below ? box.bottom + 6 : Math.max(4, box.top - tip.offsetHeight - 6)) + scrollY}px`;
  };
  for (const svg of all("figure svg")) {
    const titles = all("use > title", svg);
    if (!titles.length) continue;
    const marks = titles.map(title => title.parentNode);
    let at = -1;
    const near = event => {
      let best = null, least = 26;
      for (const mark of marks) {
        if (mark.closest(".off")) continue;
        const box = mark.getBoundingClientRect();
        const away = Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
        if (away < least) [best, least] = [mark, away];
      }
      return best;
    };
    svg.addEventListener("click", event => {
      const mark = near(event);
      if (mark) { at = marks.indexOf(mark); show(mark); } else hide();
    });
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("keydown", event => {
      const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      for (let tries = 0; tries < marks.length; tries += 1) {
        at = (at + step + marks.length) % marks.length;
        if (!marks[at].closest(".off")) { show(marks[at]); break; }
      }
    });
    svg.addEventListener("blur", hide);
  }
  document.addEventListener("click", event => { if (!event.target.closest("figure svg")) hide(); });
  // A printed page shows everything.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])");
    for (const part of closed) part.open = true;
  });
  addEventListener("afterprint", () => { for (const part of closed) part.open = false; });
})();
