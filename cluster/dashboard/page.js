// Times in the reader's own zone, and the choice of theme (kept in the browser).
customElements.define('local-time', class extends HTMLElement {
  connectedCallback() {
    const moment = new Date(this.getAttribute('datetime'));
    const today = moment.toDateString() === new Date().toDateString();
    const day = today ? {} : {day: 'numeric', month: 'short'};
    this.title = moment.toLocaleString();
    this.textContent = moment.toLocaleString([], {hour: '2-digit', minute: '2-digit', hourCycle: 'h23', ...day});
  }
});

const THEMES = ['auto', 'light', 'dark'];

function showTheme() {
  const theme = localStorage.getItem('theme') ?? 'auto';
  document.documentElement.dataset.theme = theme;
  const button = document.getElementById('theme');
  if (button) button.textContent = `Theme: ${theme}`;
}

function nextTheme() {
  const now = THEMES.indexOf(localStorage.getItem('theme') ?? 'auto');
  localStorage.setItem('theme', THEMES[(now + 1) % THEMES.length]);
  showTheme();
}

document.documentElement.lang = 'en';
showTheme();
new MutationObserver((_, observer) => {
  if (document.getElementById('theme')) { observer.disconnect(); showTheme(); }
}).observe(document.documentElement, {childList: true, subtree: true});
