"use strict";
// Loads the progress every 2 seconds, and the report when runs have changed.
const REPORT_PAUSE = 10000; // milliseconds between two reports while runs train
const live = document.getElementById("live");
const frame = document.getElementById("report");
const lost = document.getElementById("lost");
const NO_CONNECTION = lost.textContent;
let shown = null; // version of the report in the frame
let loaded = 0; // when it was requested

function opened(root, selector, key) {
  return new Set([...root.querySelectorAll(selector)].filter((d) => d.open).map(key));
}

function fit() {
  const page = frame.contentDocument;
  if (page && page.documentElement) {
    frame.style.height = page.documentElement.scrollHeight + 4 + "px";
  }
}

function showReport(version, ended) {
  const now = Date.now();
  if (version === shown || (!ended && now - loaded < REPORT_PAUSE)) return;
  const page = frame.contentDocument;
  const details = page ? [...page.querySelectorAll("details")].map((d) => d.open) : [];
  shown = version;
  loaded = now;
  frame.addEventListener("load", () => {
    const again = [...frame.contentDocument.querySelectorAll("details")];
    if (again.length === details.length) again.forEach((d, n) => { d.open = details[n]; });
    fit();
  }, { once: true });
  frame.contentWindow.location.replace("/report?version=" + version);
}

async function refresh() {
  try {
    const answer = await fetch("/progress", { cache: "no-store" });
    if (!answer.ok) throw new Error("The folder cannot be read now; this page tries again.");
    const text = await answer.text();
    const key = (d) => d.dataset.key;
    const open = opened(live, "details", key);
    live.innerHTML = text;
    live.querySelectorAll("details").forEach((d) => { d.open = open.has(key(d)); });
    lost.hidden = true;
    const progress = document.getElementById("progress");
    showReport(progress.dataset.version, progress.dataset.state !== "training");
    fit();
  } catch (error) {
    // fetch throws a TypeError if there is no connection
    lost.textContent = error instanceof TypeError ? NO_CONNECTION : error.message;
    lost.hidden = false;
  }
  setTimeout(refresh, 2000);
}

refresh();
