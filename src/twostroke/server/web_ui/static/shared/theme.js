// Light, dark or the system's colours; runs before the first paint, so that nothing flashes.
(() => {
  const KEY = "twostroke.theme";
  const ORDER = ["system", "light", "dark"];
  const root = document.documentElement;

  const read = () => {
    try {
      const kept = localStorage.getItem(KEY);
      return ORDER.includes(kept) ? kept : "system";
    } catch {
      return "system"; // storage may be forbidden
    }
  };

  const show = (theme) => {
    if (theme === "system") delete root.dataset.theme;
    else root.dataset.theme = theme;
  };

  show(read());

  window.twostrokeTheme = {
    get: read,
    next() {
      const theme = ORDER[(ORDER.indexOf(read()) + 1) % ORDER.length];
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // it then holds until the page is left
      }
      show(theme);
      window.dispatchEvent(new Event("themechange"));
      return theme;
    },
  };
})();
