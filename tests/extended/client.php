<?php
// PHP's curl with one handle, by the clients' protocol (see tests/it/py/protocol.py).
[, $verb] = $argv;
$handle = curl_init();
$retry = "-";
curl_setopt_array($handle, [
    CURLOPT_RETURNTRANSFER => true,
    CURLOPT_HEADERFUNCTION => function ($handle, $line) use (&$retry) {
        if (stripos($line, "retry-after:") === 0) {
            $retry = trim(substr($line, 12));
        }
        return strlen($line);
    },
]);
$say = function () use ($handle, &$retry) {
    $retry = "-";
    $body = curl_exec($handle);
    if ($body === false) {
        fwrite(STDERR, curl_error($handle) . "\n");
        exit(1);
    }
    echo curl_getinfo($handle, CURLINFO_RESPONSE_CODE), " $retry ", hash("sha256", $body), "\n";
};
if ($verb === "get") {
    foreach (array_slice($argv, 2) as $url) {
        curl_setopt($handle, CURLOPT_URL, $url);
        $say();
    }
} else {
    $body = substr(str_repeat(implode("", array_map("chr", range(0, 250))), intdiv((int) $argv[3], 251) + 1), 0, (int) $argv[3]);
    curl_setopt_array($handle, [CURLOPT_URL => $argv[2], CURLOPT_POST => true, CURLOPT_POSTFIELDS => $body]);
    $say();
}
