/** The value of a key, which is made when it is first asked for. */
export function valueAt<K, V>(map: Map<K, V>, key: K, make: () => V): V {
  const value = map.get(key) ?? make();
  map.set(key, value);
  return value;
}
