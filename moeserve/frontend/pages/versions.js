// Versions of a message: an answer that was made again, a question that was changed. Each keeps the messages that
// followed it, so that turning back brings them back. Pure.

/** A message without its versions. */
function itself({ versions, version, ...own }) {
  return own;
}

/** The versions of a message of which the shown one is as it stands, with what follows it. */
function keptVersions(message, after) {
  const versions = [...(message.versions ?? [null])];
  versions[message.version ?? 0] = { ...itself(message), after };
  return versions;
}

/** Puts `fresh` in the place of a message, as its newest version, and drops what follows. Returns what is there now. */
export function beginVersion(messages, message, fresh) {
  const [, ...after] = messages.splice(messages.indexOf(message));
  const versions = keptVersions(message, after);
  const made = { ...fresh, versions: [...versions, null], version: versions.length };
  messages.push(made);
  return made;
}

/** Shows another version of a message, and what followed it. */
export function turnTo(messages, message, version) {
  const [, ...after] = messages.splice(messages.indexOf(message));
  const versions = keptVersions(message, after);
  const { after: followed, ...chosen } = versions[version];
  versions[version] = null;
  messages.push({ ...chosen, versions, version }, ...followed);
}
