// Light, dark or as the system says. Loaded before the page is drawn, so that it does not flash.
(() => {
  "use strict";
  const KEY = "moeserve.theme";
  const ORDER = ["auto", "light", "dark"];

  // Canvases take their colours from the style when they are drawn.
  function tell() {
    document.dispatchEvent(new Event("themechange"));
  }

  function read() {
    const kept = localStorage.getItem(KEY);
    return ORDER.includes(kept) ? kept : "auto";
  }

  function apply(theme) {
    document.documentElement.dataset.theme = theme;
    for (const button of document.querySelectorAll("[data-action=theme]")) {
      button.textContent = `Theme: ${theme}`;
    }
    tell();
  }

  apply(read());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
  document.addEventListener("DOMContentLoaded", () => apply(read()));
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-action=theme]")) return;
    const next = ORDER[(ORDER.indexOf(read()) + 1) % ORDER.length];
    localStorage.setItem(KEY, next);
    apply(next);
  });
  window.addEventListener("storage", (event) => {
    if (event.key === KEY) apply(read());
  });
})();
